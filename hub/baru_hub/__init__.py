"""The hub: one target model that verifies what many nodes draft."""
