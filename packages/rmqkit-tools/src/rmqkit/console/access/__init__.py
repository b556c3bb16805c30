"""Access to the console: the origin of a request, logins, the confirmation of a change, the audit."""
