"""One model on several processes: meshes, sharding, expert parallelism."""
