"""`Replica`, a local copy of collections that is edited without a network and kept in sync with one."""
