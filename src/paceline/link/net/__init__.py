"""How nodes find each other and talk: rendezvous, authentication, framing, routes, TLS."""
