"""LoRA adapters of any rank on one resident base."""
