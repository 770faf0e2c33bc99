"""Text in, text out: tokenizes, drives `xllm_worker` over its JSON Lines, and fetches a model to try it with.

Owns no model computation: tokens in and out are the worker's.
"""
