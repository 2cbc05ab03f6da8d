"""Several engine processes behind one address (`glm5 serve DIR --dp N`): who gets a request, and what if he fails."""
