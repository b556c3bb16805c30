"""Access to the console: the checks of requests, logins, the confirmation of a change, the audit."""
