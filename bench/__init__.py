"""Measurements: what drafting gains on real models here, and on simulated devices and links."""
