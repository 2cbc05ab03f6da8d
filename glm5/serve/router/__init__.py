"""Several engine processes at one address (`glm5 serve DIR --dp N`): routing of requests, and failover."""
