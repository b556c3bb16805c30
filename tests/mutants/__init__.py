"""Mutation tests: change the code of a room in one place, and see whether the tests of the room fail."""
