"""Commands that inspect and change a cluster: a module for each noun, or for a few; mqadmin's names for them; `top`."""
