"""The text front of `xllm_worker`: tokenizes prompts, detokenizes answers, and fetches a small model to try.

The worker computes all tokens.
"""
