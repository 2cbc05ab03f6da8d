"""From files to packed token rows: sources, shards, loader, packing."""
