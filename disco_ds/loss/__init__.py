"""The exact contrastive loss over the pairs of all ranks."""
