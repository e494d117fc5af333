"""Recipes: schema, finding, overriding, and the shipped YAML files."""
