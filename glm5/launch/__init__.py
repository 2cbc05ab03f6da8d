"""Where processes live: chained stages, the local pipeline, and what works on this machine."""
