"""A simulated year of running a vending machine, after the idea of Vending-Bench (§6.1)."""
