"""What each page shows: one module per noun, one function per page. `rmqkit.console.routes.ROUTES` names them."""
