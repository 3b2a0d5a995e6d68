"""AdamW, linear warm-up, cosine decay, clipping by global norm."""

import optax

from agent.config import OptimizerConfig


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by step: linear from 0 over ``warmup`` steps, then cosine to the end."""
    warmup = min(config.warmup, config.steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def make(config: OptimizerConfig) -> optax.GradientTransformation:
    """The transformation of gradients into updates."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule(config), weight_decay=config.weight_decay),
    )
