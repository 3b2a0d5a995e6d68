"""Agentic Transformer and baselines: model, training, checkpoints, rollouts, statistics, reports."""
