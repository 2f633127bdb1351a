"""Attention backends for inference engines: `tessera.serve.vllm` and `tessera.serve.sglang`.

Neither engine is imported here. Each module derives its classes from the engine's own, where the engine is installed,
and has a function `register` that makes the backend known to it.
"""
