"""The live tower's fast form on a GPU: the plain tower's numbers with fewer roundings, passes and launches."""
