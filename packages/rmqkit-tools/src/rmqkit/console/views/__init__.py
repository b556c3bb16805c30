"""The pages: one module per noun, one function per page. They are listed in `rmqkit.console.request.routes.ROUTES`."""
