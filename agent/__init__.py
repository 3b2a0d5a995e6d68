"""Agentic Transformer and baselines: networks, training, checkpoints, rollouts, reports."""
