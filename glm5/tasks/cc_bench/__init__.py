"""CC-Bench-V2 made anew in the open (§6.2, App. B.4): frontend, backend, exploration of repositories, chained tasks."""
