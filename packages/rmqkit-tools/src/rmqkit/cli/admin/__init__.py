"""Commands that inspect and change a cluster, by nouns; `mqadmin` has the names of Apache's tool, `top` a live view."""
