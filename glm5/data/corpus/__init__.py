"""Corpora of any size, part by part, with datatrove: sources, filters, deduplication, token shards, an account."""
