"""The pages: one module per noun, one function per page. `rmqkit.console.request.routes.ROUTES` names them."""
