"""Jobs on a cluster: sites, scripts, chains of jobs, and the supervisor that keeps one going."""
