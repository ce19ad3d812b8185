"""Causal attention of ragged prompts (prefill) over paged KV."""
