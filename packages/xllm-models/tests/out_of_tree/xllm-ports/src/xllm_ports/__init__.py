"""Mixtral, OLMo-2 and GLM-4-MoE for xllm_models, found by their entry points."""
