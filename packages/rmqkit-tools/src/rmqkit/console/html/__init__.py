"""HTML of the console: templates, charts, static files, and the translation of texts."""
