"""`python -m glm5`."""

from glm5.cli import main

main()
