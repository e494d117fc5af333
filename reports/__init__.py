"""Comparing and deciding: pairing, statistics, policies, tables and reports."""
