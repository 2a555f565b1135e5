"""Belayer: fault tolerance for LLM agentic RL training."""
