"""Several processes for one model: meshes, sharding, expert parallelism."""
