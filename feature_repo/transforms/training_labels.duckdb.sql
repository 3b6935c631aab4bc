-- Positive labels of a day's impressions as known by the cut: outcomes inside their attribution window.
-- Inputs: frame(row_id, request_id, ad_code, timestamp_us), outcomes (known by the cut), labels(name, code, window_us),
-- ads (catalogue of the day). Parameters: cut_us.
select distinct
    frame.row_id,
    labels.code as task
from outcomes
join labels on labels.name = outcomes.label
join ads on ads.ad_id = outcomes.ad_id
join frame on frame.request_id = outcomes.request_id and frame.ad_code = ads.ad_code
where outcomes.value > 0
    and epoch_us(outcomes.known_at) < $cut_us
    and epoch_us(outcomes.event_time) - frame.timestamp_us <= labels.window_us
order by row_id, task
