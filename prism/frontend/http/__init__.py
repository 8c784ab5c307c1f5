"""HTTP below the routes: sockets, connections, middleware, access control, and errors."""
