"""Envs and samplers on other machines."""
