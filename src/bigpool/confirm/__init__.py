"""From a captured launch and a finding to a reproduction: the same launch, moved to where the finding says that it breaks."""
