"""A page for the person who runs a kit: what nodes, links and sessions do now. It looks, and changes nothing."""
