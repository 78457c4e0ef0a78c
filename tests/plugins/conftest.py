"""What the packages here bring along isn't collected: their tests run as their authors run them."""

collect_ignore = ["version1"]
