-- ARGV: device, epoch, entry ids. Removes waiting entries, whose requests ended here. A newer
-- attempt has another entry and stays.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
for i = 3, #ARGV do drop_entry(device, ARGV[i]) end
return 0
