"""Training: one loop for all stages, which differ in their data and their loss."""
