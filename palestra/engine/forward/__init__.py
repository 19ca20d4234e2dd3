"""Layers of a forward pass: packed rows, trees of siblings, linear layers, attention."""
