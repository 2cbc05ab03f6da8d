"""One model on several processes: meshes, sharding, expert and context parallelism."""
