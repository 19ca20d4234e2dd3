"""Shared by envs: answers, options, splits, few-shot prompts, rows of data, and arithmetic on expressions."""
