"""Splits mini-batches, joins outputs, and reaches the tensors inside any pytree."""
