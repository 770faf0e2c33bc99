"""OLMo-3 and ERNIE 4.5 MoE for xllm_models, found by their entry points."""
