"""The node as an OpenAI-compatible HTTP endpoint.

Shapes and names of requests and answers are those of the OpenAI API reference (chat completions, completions, models).
"""
