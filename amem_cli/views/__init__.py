"""What several commands show: usage on disk, objects, decoded text, histories as graphs."""
