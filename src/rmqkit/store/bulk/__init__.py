"""Work on whole stretches of the log at once, with numpy."""
