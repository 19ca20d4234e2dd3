"""The browser dashboard: a server that only reads run directories, and the built page that it serves."""
