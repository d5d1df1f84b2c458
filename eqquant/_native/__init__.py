"""Loads `eqquant-cpu`, calls it, and lowers primitives to it."""
